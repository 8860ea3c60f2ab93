"""Sphinx configuration: builds this folder's pages as HTML. `make docs` turns every warning into an error."""

project = "RLHF on Triton"
extensions = ["myst_parser"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1150px", "sidebar_width": "200px", "fixed_sidebar": True}
html_show_copyright = False
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 3  # so that a link to a missing heading is a warning
