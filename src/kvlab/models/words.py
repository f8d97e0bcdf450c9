"""Common English words, most frequent first: the tokens of `kvlab.models.word_tokenizer` beside bytes."""

from __future__ import annotations

_TEXT = """
the of and to in is that it was for on are as with his they at be this have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get through
back much before go good new write our used me man too any day same right look think also around another came
come work three word must because does part even place well such here take why things help put years different
away again off went old number great tell men say small every found still between name should home big give air
line set own under read last never us left end along while might next sound below saw something thought both few
those always looked show large often together asked house world going want school important until form food keep
children feet land side without boy once animals life enough took sometimes four head above kind began almost
live page got earth need far hand high year mother light parts country father let night following picture being
study second eyes soon times story boys since white days ever paper hard near sentence better best across during
today others however sure means knew try told young miles sun ways thing whole hear example heard several change
answer room sea against top turned learn point city play toward five using himself usually money seen car
morning given trees ship body upon family later turn move face door cut done group true leave color red friends
pretty eat front feel fact hold town south easy yes behind stop girl sky deep clear state green question less
plan system model token cache memory block server data value test result problem reason idea language text code
file list user run call step start open close build check return input output process function class type string
error key field table row column index node tree graph path rate speed size limit length count total average
request response message prompt context window attention layer weight batch order queue free full share store
load copy swap common simple general special possible human power matter music book letter river mountain care
wind rest voice dark ball fast horse birds ready anything space map game rule notice cold wave plane stone
minute strong mind tail produce street inch multiply nothing course stay wheel force blue object decide surface
moon island foot busy record boat gold dry wonder laugh thousand ago ran shape equate hot miss brought heat snow
bring distant fill east paint among wish drop heart grand sail equal present heavy dance engine position arm
wide material fraction forest sit race summer train sleep prove lone leg exercise wall catch mount board joy
winter written wild instrument kept glass grass cow job edge sign visit past soft fun bright gas weather month
million bear finish happy hope flower clothe strange gone trade melody trip office receive mouth exact symbol
least trouble shout except wrote seed tone join suggest clean break lady yard rise bad blow oil touch grew cent
mix team wire cost lost brown wear garden sent choose fell fit flow fair bank collect save control decimal ear
else quite broke case middle son lake moment scale loud spring observe child straight nation dictionary milk
method organ pay age section dress cloud surprise quiet tiny climb cool design poor lot experiment bottom iron
single stick flat twenty skin smile crease hole jump baby eight village meet root buy raise solve metal whether
push seven paragraph third shall held hair describe cook floor either burn hill safe cat century consider law
bit coast phrase silent tall sand soil roll temperature finger industry fight lie beat excite natural view sense
capital chair danger fruit rich thick soldier operate guess necessary sharp wing create neighbor wash bat rather
crowd corn compare poem bell depend meat rub tube famous dollar stream fear sight thin triangle planet hurry
chief colony clock mine tie enter major fresh search send yellow allow print spot desert suit current lift rose
continue track parent shore division sheet substance favor connect post spend chord glad original station dad
bread charge proper bar offer segment duck instant market degree populate chick dear enemy reply drink occur
support speech nature range steam motion liquid log meant quotient teeth shell neck
"""
WORDS = tuple(_TEXT.split())
