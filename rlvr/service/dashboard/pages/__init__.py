"""The pages: each a function of a source and of what its address says, whose answer is a tree of elements.

They know neither NiceGUI nor HTTP (`rlvr.service.dashboard.routes` does), so a test can call them. Model output reaches
them through `data.visible` and leaves them as text. Exercised by tests/test_dashboard_pages.py.
"""
