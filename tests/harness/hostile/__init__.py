"""Files that somebody forged, damaged or made to hurt, and what they must come to.

Checkpoints, model folders and run files: `CASES` of each are named by what they try, `mutated` draws more, and
`attempts` gives them to the command. Tests run them, and so does ``benchmarks/hostile_files.py``.
"""
