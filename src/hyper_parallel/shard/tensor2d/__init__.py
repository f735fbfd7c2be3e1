"""2D tensor parallelism with the sequence fused in: attention and MLP over tensor_y · tensor_x, [T/y, h/x] between.

`plan.plan_tensor_2d` upgrades the regions of the 1D plan that it knows; `apply.apply_tensor_2d` puts them into effect.
"""
