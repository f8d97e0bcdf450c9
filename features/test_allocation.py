from pytest_bdd import scenarios

scenarios("allocation.feature")
