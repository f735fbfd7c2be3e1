"""HyperMPMD's first level: compute beside communication in one device.

`overlap` rewrites a step's graph so that collectives run while kernels do, as far as the simulation says that it pays.
"""
