from pytest_bdd import scenarios

scenarios("fleet_groups.feature")
