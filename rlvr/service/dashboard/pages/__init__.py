"""The pages: functions from a source and an address's parameters to a `Page`, which names its template and its data.

They know nothing of HTTP (`rlvr.service.dashboard.dashboard_routes` does), so a test can call them. Markup is in
`templates/` alone, where every text is escaped; model output reaches it through `visible_text`.
"""
