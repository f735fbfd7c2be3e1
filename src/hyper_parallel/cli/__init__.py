"""The command `hyper-parallel`: a module for each subcommand. Nothing here imports torch before it must.

Exit codes: 0 done, 1 a check failed or the run died, 2 a mistake of the user's, 130 interrupted.
"""
