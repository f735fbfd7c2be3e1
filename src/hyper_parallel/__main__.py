"""``python -m hyper_parallel``, and so ``torchrun -m hyper_parallel``: the command line."""

from hyper_parallel.cli.main import main

if __name__ == "__main__":
    main()
