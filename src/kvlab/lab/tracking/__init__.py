"""Where runs are recorded: an MLflow store, or nowhere.

The only package that knows MLflow. It is imported when a run starts, not before (it takes a second), and
used through a client of its own: no active run, no global URI, so several runs can be tracked in one
process. Whatever goes wrong with a store is a `TrackingError` that names it.
"""

from kvlab.lab.tracking.base import RunStatus, Tracker, send_all
from kvlab.lab.tracking.mlflow_tracker import MlflowTracker, start_run
from kvlab.lab.tracking.store import Store, open_store

__all__ = ["MlflowTracker", "RunStatus", "Store", "Tracker", "open_store", "send_all", "start_run"]
