"""Published training runs, as their sources state them: what constants are fitted on, or held against.

`RUNS`, `RECIPES` and `TRANSCRIBED` are CSVs of the same columns; `SOURCES.md` says where each row is from, and what to
beware of. Nothing in them is estimated, and an empty cell is not stated by its source.
"""

from pathlib import Path

RUNS = Path(__file__).with_name("training_runs.csv.gz")
"""4,082 runs; `fit.rows.rows` and `fit.cells.records` read it."""

RECIPES = Path(__file__).with_name("recipe_runs.csv")
"""98 more of NVIDIA's own recipes on H100, in 16 and in 8 bits; constants are fitted on them too."""
TRANSCRIBED = Path(__file__).with_name("transcribed_runs.csv")
"""71 more, of other sources: no constant is fitted on them, so that they tell how estimates hold for what is new."""
