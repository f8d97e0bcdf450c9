from pytest_bdd import scenarios

scenarios("block_tables.feature")
