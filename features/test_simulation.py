from pytest_bdd import scenarios

scenarios("simulation.feature")
