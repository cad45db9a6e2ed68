"""The dashboard: runs and sessions live, their curves, and every answer with its verdicts, in a browser.

    from rlvr.service.dashboard.dashboard_app import attach

    attach(app, StoreSource(store))  # on the service's application, after its own routes
    attach(app, RunSource(folder))   # what `rlvr view RUNDIR` does

NiceGUI is imported by the first request of a page, not before. `dashboard_data` defines what pages show, `run_source`
and `session_source` provide it, `pages/` draws it, and `assets/` has the style sheet and our two browser components.
"""
