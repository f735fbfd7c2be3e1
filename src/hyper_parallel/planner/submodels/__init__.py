"""Allocation of devices to the parts of a multimodal model: encoders and a language model.

`sizes` and `stages` say what parts cost on their devices, `steps` simulates a step, `search` finds the best sizes,
`answer` shows them, `run_file` writes them and `chart` draws them.
"""
