from pytest_bdd import scenarios

scenarios("kernels.feature")
