"""kvscope.kernels: arrays in, arrays out.

`ops` is the one table of operations and of which implementation serves each; `layout` says how a KV page is laid
out. This package knows no request, no block pool and no screen. Keep this file light and without `__version__`:
from the root of a clone, transformers finds the folder and takes it for its own optional package.
"""
