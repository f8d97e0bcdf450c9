from pytest_bdd import scenarios

scenarios("memory_metrics.feature")
