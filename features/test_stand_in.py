from pytest_bdd import scenarios

scenarios("stand_in.feature")
