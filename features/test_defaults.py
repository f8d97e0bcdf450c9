from pytest_bdd import scenarios

scenarios("defaults.feature")
