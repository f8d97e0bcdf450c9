from pytest_bdd import scenarios

scenarios("attention_on_pages.feature")
