"""Sphinx configuration: builds this folder's pages as HTML. `make docs` turns every warning into an error."""

project = "RLHF on Triton"
extensions = ["myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_title = project
html_show_copyright = False
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 3  # so that a link to a missing heading is a warning
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output are not copied
