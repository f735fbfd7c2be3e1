"""The command `hyper-parallel`: one module per subcommand. torch is imported only where a command needs it.

Exit codes: 0 done, 1 a check failed or the run died, 2 a user error, 130 interrupted.
"""
