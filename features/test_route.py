from pytest_bdd import scenarios

scenarios("route.feature")
