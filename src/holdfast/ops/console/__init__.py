"""The console: a page for browsers that shows and steers everything through the public API.

`files` reads its ES modules, styles and icon from the wheel. The page uses the routes of `/v1` and its event streams only.
"""
