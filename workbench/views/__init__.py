"""One view a file; each has sources, a root and `update(frame)`, and can stand alone in a cell. See base.py."""
