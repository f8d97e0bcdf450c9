from pytest_bdd import scenarios

scenarios("explain.feature")
