"""The dashboard: runs and sessions live, their curves, and every answer with its verdicts, in a browser.

    from rlvr.service.dashboard.dashboard_app import attach

    attach(app, StoreSource(store))  # on the service's application, after its own routes
    attach(app, RunSource(folder))   # what `rlvr view RUNDIR` does

`dashboard_data` defines what pages show, `run_source` and `session_source` provide it, `pages/` chooses what a page has
of it, `templates/` draws that, `assets/` has the style sheet and scripts, and `page_changes` tells open pages of what
is new. Pages and templates are imported by the first request, not before.
"""
