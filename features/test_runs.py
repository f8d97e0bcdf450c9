from pytest_bdd import scenarios

scenarios("runs.feature")
