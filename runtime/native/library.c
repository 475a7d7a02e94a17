#include "codecs.h"

/* Tests set it. */
int taccl_plain;

/* What Python asks first; VERSION in __init__.py. */
int taccl_version(void)
{
    return 10;
}
