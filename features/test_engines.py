from pytest_bdd import scenarios

scenarios("engines.feature")
