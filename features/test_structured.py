from pytest_bdd import scenarios

scenarios("structured.feature")
