/* What Python asks first; VERSION in __init__.py. */
#include <stdint.h>

int taccl_version(void)
{
    return 7;
}
