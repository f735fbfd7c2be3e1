"""From published runs to constants: rows of a CSV, least squares, and judgement by sources that were held out."""
