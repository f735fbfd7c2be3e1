"""What a run would take on a cluster, told on a laptop: a run file, captured on ranks that are not there, simulated.

`predict_run(config, cluster)` gives a `Prediction`: a Timeline, whether the step fits the devices' memory, and what was
assumed. `foreseen(config, cluster)` tells a step's seconds and peak with its collectives ordered as training would.
"""

from hyper_parallel.predict.few import Foreseen, foreseen
from hyper_parallel.predict.prediction import Prediction
from hyper_parallel.predict.run import cluster_of, predict_run

__all__ = ["Foreseen", "Prediction", "cluster_of", "foreseen", "predict_run"]
