from pytest_bdd import scenarios

scenarios("advice.feature")
