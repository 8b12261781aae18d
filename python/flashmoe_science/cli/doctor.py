SUMMARY="";EXAMPLES=""
def add_arguments(p):pass
run=None
