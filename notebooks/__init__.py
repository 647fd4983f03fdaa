"""The notebooks, shipped as data of the package; `kvscope lab` copies them to a folder of the user's."""
