from pytest_bdd import scenarios

scenarios("sweeps.feature")
