from pytest_bdd import scenarios

scenarios("fleets.feature")
