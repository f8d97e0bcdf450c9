from pytest_bdd import scenarios

scenarios("scheduling.feature")
