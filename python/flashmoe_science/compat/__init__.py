"""Other libraries' function names and layouts, so that changing an import is enough."""
