from pytest_bdd import scenarios

scenarios("isolation.feature")
