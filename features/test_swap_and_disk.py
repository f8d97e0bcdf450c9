from pytest_bdd import scenarios

scenarios("swap_and_disk.feature")
