"""Inside other trainers: Transformers' Trainer, TRL's, LlamaFactory's. Their loop, our step.

Each folder here is for one of them and imports it when a class is first used. The files beside are what they share.
"""
