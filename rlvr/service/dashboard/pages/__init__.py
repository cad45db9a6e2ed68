"""The pages: functions from a source and an address's parameters to a tree of elements.

They know neither NiceGUI nor HTTP (`rlvr.service.dashboard.dashboard_routes` does), so a test can call them. Model
output reaches them through `visible_text` and stays text.
"""
