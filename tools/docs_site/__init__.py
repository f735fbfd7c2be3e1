"""Generated parts of the documentation site: pages of reference (schema, commands, public names), and links.

tools/docs_hooks.py gives them to mkdocs. Nothing here needs mkdocs or PyTorch.
"""
