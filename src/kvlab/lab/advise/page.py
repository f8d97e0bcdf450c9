def write_page(advice, path):
    pass
