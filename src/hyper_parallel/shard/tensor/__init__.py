"""Tensor parallelism: plans and wrappers for the tensor axes taken as one (1D), and for tensor_y · tensor_x (2D).

`plan_1d` plans from rules; `plan_2d` upgrades the regions that it knows, with activations [T/y, h/x] between them.
`apply_1d` and `apply_2d` put the plans into effect.
"""
