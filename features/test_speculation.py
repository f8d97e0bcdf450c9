from pytest_bdd import scenarios

scenarios("speculation.feature")
