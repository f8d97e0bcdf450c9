from pytest_bdd import scenarios

scenarios("endings.feature")
