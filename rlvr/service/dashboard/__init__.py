"""The dashboard: runs and sessions live, their curves, and every answer with what was said of it, in a browser.

    from rlvr.service.dashboard.mount import attach

    attach(app, StoreSource(store))  # on the service's application, behind all of its routes
    attach(app, RunSource(folder))   # what `rlvr view RUNDIR` does

Nothing here imports NiceGUI until the first page is asked for. `data` says what the pages show, `runs` and `sessions`
are the two places it comes from, `pages/` draw it, `assets/` hold the style sheet and the two components of our own.
Exercised by tests/test_dashboard*.py, in a real browser.
"""
