from pytest_bdd import scenarios

scenarios("windows.feature")
