from pytest_bdd import scenarios

scenarios("traffic.feature")
