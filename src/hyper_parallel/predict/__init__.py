"""What a run would take on a cluster, told on a laptop: a run file, captured on ranks that are not there, simulated.

`predict_run(config, cluster)` gives a `Prediction`: a Timeline, whether the step fits the devices' memory, and what was
assumed.
"""

from hyper_parallel.predict.prediction import Prediction
from hyper_parallel.predict.run import cluster_of, predict_run

__all__ = ["Prediction", "cluster_of", "predict_run"]
